"""TensorRT-LLM 1.2.1 from the outside: its checkpoint format, its tools' flags, its model repository and its launch."""
