"""Folders of DeepSpeed, with ZeRO and without."""
