"""Python imports this at start from ``PYTHONPATH``, in a server and in every process that it spawns."""

import cpu_host_runtime

cpu_host_runtime.arm()
