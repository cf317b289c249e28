"""DeepSpeed folders, with ZeRO and without."""
