"""One file a rank, checked: python examples/convert_and_verify.py CHECKPOINT OUTPUT PRESET. Run it again to resume."""

import sys
from pathlib import Path

from kimi_k2 import convert
from kimi_k2.sharding.verify import faults

checkpoint, output, preset = sys.argv[1:]
manifest = convert(checkpoint, output, preset)
error = manifest["errors"]["total"]
print(f"{len(manifest['files'])} files; the experts' conversion error is {error['relative_l2']:.1e} (relative L2)")
found = list(faults(Path(output)))
print("\n".join(map(str, found)) or "every tensor's bytes are those of the manifest")
sys.exit(bool(found))
