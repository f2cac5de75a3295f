"""Is the sharded model the serial one: loss, outputs and every gradient compared.

`verify` runs a `Subject` (a model, its batch, its loss) on both sides: in processes
(`by_processes`, on a `local_world`), or with the ranks as threads (`by_threads`, on
`program_check`). Each quantity is a `Comparison`; all of them are the `Proof`.
"""

from autoshard.verification.proof import Proof, verify
from autoshard.verification.subject import Subject
