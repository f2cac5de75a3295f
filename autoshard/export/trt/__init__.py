"""From a rank graph to a TensorRT network: one converter an operator, one idea a file.

The `tensorrt` module, TensorRT 11 or later or TensorRT-RTX, is given by the caller; nothing here
imports it.
"""
