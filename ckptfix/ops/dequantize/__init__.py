"""Plain weights from quantized ones: how each scheme lays out its codes, and the numbers that they stand for."""
