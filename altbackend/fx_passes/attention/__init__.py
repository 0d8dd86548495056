"""Attention that a program writes out as products and a softmax, as one call of the fused operator."""
