"""From a model to what a server loads, from one process or from a running sharded job.

autoshard.export.trtllm(model, directory, mesh={"tp": 4, "pp": 2})   TensorRT-LLM <= 1.2
autoshard.export.huggingface(model, directory)                       gathered Hugging Face directory
autoshard.export.tensorrt(model, directory, mesh={"tp": 2})          TensorRT engines, one a rank
autoshard.export.onnx(model, directory, mesh={"tp": 2})              ONNX models, one a rank
"""

from autoshard.export.destination import check_target
from autoshard.export.errors import ExportError
from autoshard.export.quantization import QuantizedModel
from autoshard.export.spec import EngineSpec, example_call
from autoshard.export.to_huggingface import huggingface
from autoshard.export.to_onnx import onnx
from autoshard.export.to_tensorrt import tensorrt
from autoshard.export.to_trtllm import trtllm, trtllm_build
