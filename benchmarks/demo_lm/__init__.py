"""`foray demo-lm`: a pretrained language model learns to answer real questions by searching, on a CPU."""
