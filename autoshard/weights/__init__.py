"""Live weights, from the processes that train to those that generate, without a disk.

    autoshard.weights.send(model, version=step)      on the ranks that train
    autoshard.weights.receive(model)                 on the ranks that generate

Every process of a link takes part in each update, by one of these functions. Who sends what to whom
follows from what each of them holds (`moves.py`); an update is done by all or by none.
"""

from autoshard.weights.link import WeightLink, meet
from autoshard.weights.parts import Sender, Tensors, part_of, parts_of
from autoshard.weights.servers import ServerTensors
from autoshard.weights.update import BUFFER, receive, send, transfer
