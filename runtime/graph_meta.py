"""The keys of metadata that autoshard writes on graphs and nodes, each with its writer and readers.

Torch's own keys keep their spelling in the code: `val` (the fake of a node's value), `stack_trace`,
`nn_module_stack`, `recompute` and `ac_graph_id` (a region of activation checkpointing), `custom`.
"""

# Of a GraphModule.

N_OUTPUTS = "n_outputs"
"""int: how many results are the user's; the rest are new values of inputs. capture; everyone."""

MUTATED = "mutated"
"""tuple of int: the placeholders that the further results are written to. capture; Localize."""

ENABLE_GRAD = "enable_grad"
"""bool: the caller's grad mode is off and the graph turns it on. capture; the backend."""

WITHOUT_GRADIENTS = "without_gradients"
"""bool: gradients are off around the call, whatever the nodes say. capture; the planner,
Canonicalize, Float8Products, ChunkLoss."""

OUTPUT_STATES = "output_states"
"""list of State: of each of the user's results, on the planned axis. Localize; the backend."""

OUTPUT_EXTENTS = "output_extents"
"""list of int or None: the whole extent of the split dim of each. Localize; the backend."""

PENDING_INPUTS = "pending"
"""list of PendingInput: the inputs after the user's. DataParallel; the backend, Program.memory."""

ATTENTION_MASKS = "attention_masks"
"""Counter of MaskFound: what the masks of attention were found to be. RecoverMasks; explain."""

MIXTURES = "mixtures"
"""Counter of MixtureFound: the mixtures of experts of the graph. MatchExperts; explain."""

FLOAT8 = "float8"
"""Counter of ProductFound: products in float8, and those left. Float8Products; explain."""

CHUNKED = "chunked_loss"
"""Counter of LossFound: losses by chunks of rows, and those left whole. ChunkLoss; explain."""

WITHHELD = "withheld"
"""tuple of int: the user's results that the graph does not make, and has None for. ChunkLoss; the
backend, verify."""

FACTS = "facts"
"""dict of int to str: what must be true of the values of placeholders, by their index, in calls of
the graph. RecoverMasks; the backend."""

ENCODER = "encoder"
"""GraphModule: the encoder that was split off an exported graph. SplitEncoder; InferencePlan."""

# Of a node.

DIFF = "diff"
"""bool: whether a gradient flows through it. capture, `emit`; the planner, passes."""

BUFFER = "buffer"
"""bool, of a placeholder: a buffer of the model. build; Program.memory, planning.estimate."""

GIVEN = "given"
"""bool, of a placeholder: an input of the batch with a gradient, which a pipeline treats like a
parameter that all ranks hold. build_pipeline; what its stages hold."""

REWRITTEN = "rewritten"
"""bool, of a placeholder: an activation that the graph writes to where autograd sees it: gradients
of later readers are the new value's. capture; Localize, `backend_fakes`, a pipeline's call."""

STORED_DTYPE = "stored_dtype"
"""torch.dtype, of a placeholder: a parameter is stored in it and computed in another. build; the
prices of a step, Built."""

REDUCED_DTYPE = "reduced_dtype"
"""torch.dtype, of a placeholder: gradients travel in it over the data-parallel axes. mesh_search;
the prices of a step."""

OWN_AXIS = "own_axis"
"""str, of a placeholder: the data-parallel axis on which a rank uses what it stores of a parameter,
and no more. ExchangeExperts; DataParallel."""

ROLE = "role"
"""str, of a placeholder of an exported graph: what the caller gives by it, see Port.
NamePlaceholders, SplitEncoder, WithCache, KeepLastTokens; the ports of a RankGraph."""

WEIGHT = "weight"
"""RankWeight, of a placeholder of an exported graph: the parameter. NamePlaceholders,
QuantizeWeights; RankGraph."""

HELD = "held"
"""torch.Tensor, of a placeholder of an exported graph: its value, a constant. NamePlaceholders and
passes that add constants; RankGraph, what is computed from sizes and constants."""

SIGHT = "sight"
"""Sight, of an attention of an exported graph: what its queries see. PlainAttention; WriteMasks,
WithCache."""

# In a node's `custom`, which AOTAutograd carries into the forward and the backward graph.

PASS = "autoshard_pass"
"""str: the pass that made the node. `emit`; ScheduleCollectives, memory, tests."""

CHANGE = "autoshard_change"
"""str: "value: S(0) -> I", what a collective is for. Localize, ExchangeExperts, DataParallel,
GlobalTokenMean and the buckets; Program.collectives."""

MODULE = "autoshard_module"
"""str: dotted path of the module that the node serves. Localize, the buckets; Program.collectives,
the buckets."""

LINE = "autoshard_line"
"""str: file:line of the user's code. Localize; Program.collectives."""

READER = "autoshard_reader"
"""str: the module that needs the new state. Localize, of changes; Program.collectives."""

READER_LINE = "autoshard_reader_line"
"""str: the line that needs it. Localize, of changes; Program.collectives."""

BUCKET = "autoshard_bucket"
"""str: weights of one kind share buckets, see `kind_of`. DataParallel; the buckets."""

VALUE = "autoshard_value"
"""str: the value of the plan that the node makes, by `value_text`. Localize; `set_fate`."""

HOST = "autoshard_host"
"""bool: a value that the plan keeps in the host's memory for backward. `set_fate`; keep_on_host."""

COPY = "autoshard_copy"
"""int: the number of the operator in the graph of which the short form is traced; gone when what
was traced is whole. capture.five_layers; capture.five_layers."""

NO_GRAD = "autoshard.no_grad"
"""bool: the node was made inside a no_grad region; gone when capture returns. capture; capture."""

RANDOM_STATE = "autoshard_random_state"
"""str: the named random state that a draw is from. capture; InvariantRandom."""
