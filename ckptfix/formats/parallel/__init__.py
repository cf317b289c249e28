"""Models that tensor and pipeline parallelism cut into files: Megatron-LM, Meta's ``consolidated.NN.pth``, fairseq."""
