"""The values that the tests of this folder try, and how long a process of a release may take."""

from __future__ import annotations

from packaging.version import Version

from sglang_sm120.backends import BACKENDS

#: Values that at least one supported release lacks and that we add there.
OURS = [
    b.value
    for b in BACKENDS.values()
    if b.can_be_added and (b.native_since is None or Version(b.native_since) > Version("0.5.9"))
]
#: Our values that the release's own enum has too: its own stays in force.
NATIVE_SINCE = {b.value: Version(b.native_since) for b in BACKENDS.values() if b.native_since and b.value in OURS}
#: Seconds.
DEADLINE = 420
