"""The roles of a decoder's weights, read from its serial graph."""

from autoshard.export.decoder.hf_config import (
    ConfigFacts,
    architecture_of,
    config_facts,
    rotary_magnitude,
)
from autoshard.export.decoder.reading import read_decoder
from autoshard.export.decoder.structure import Attention, Decoder, Layer, Linear, Mlp, Norm
