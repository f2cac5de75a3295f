"""Run the engines of an engine directory, one a rank: buffers, communicator, generation.

torchrun --nproc-per-node=2 serve.py

engine = autoshard.runtime.engine.load("engines")
print(engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=32))
"""

from autoshard.runtime.engine.generation import Engine, NewWeights
from autoshard.runtime.engine.loading import FORMAT, FORMAT_VERSION, TensorRT, load, read_config
