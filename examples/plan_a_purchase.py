"""Which deployments hold a model, and modelled times: python examples/plan_a_purchase.py MODEL [PRESET ...]."""

import sys

from kimi_k2 import plan
from kimi_k2.errors import ConfigError
from kimi_k2.plan.deployment import preset_names

if len(sys.argv) < 2:
    raise SystemExit(__doc__)
model, *presets = sys.argv[1:]
for preset in presets or preset_names():
    try:
        report = plan(model, preset)
    except ConfigError as error:  # the ranks cannot share this model's sizes
        print(f"{preset:32} no: {error}")
        continue
    time = report["tpot"]["expected"]
    words = f"expected {time['low'] * 1e3:.0f} to {time['high'] * 1e3:.0f} ms a token, " if time else ""
    print(f"{preset:32} {words}bound {report['tpot']['bound'] * 1e3:.2f} ms; {report['rank_memory']['verdict']}")
