"""What a machine does in truth: products, memory and links, timed and fitted to the cost model."""

from autoshard.measuring.machine import Measured, measure_machine
