"""Imported, it does what a process does once before it compiles: forks of it need not do it again.

Modules that are loaded late, patterns that Inductor looks for, and probes of the C++ compiler take
longer than most of what the tests compile.
"""

from __future__ import annotations

import gc
import threading

import torch
import torch._inductor.config
from torch import hub

from torch_hybrid.graphs.compiling.toolchain import missing_tools

# A process is forked safely while it has one thread: kernels and the compiler start none here, and
# progress bars none that watches them.
hub.tqdm.monitor_interval = 0
num_threads = torch.get_num_threads()
torch.set_num_threads(1)
if not missing_tools(torch.device("cpu")):
    with torch._inductor.config.patch(compile_threads=1):
        torch.compile(torch.nn.functional.silu, fullgraph=True)(torch.ones(3))
    torch._dynamo.reset()
torch.set_num_threads(num_threads)
gc.collect()
gc.freeze()  # no fork looks at it again
assert threading.active_count() == 1
