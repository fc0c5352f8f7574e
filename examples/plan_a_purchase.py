"""Which deployments hold a model, and modelled times: python examples/plan_a_purchase.py MODEL [PRESET ...]."""

import sys

from kimi_k2 import plan
from kimi_k2.errors import ConfigError
from kimi_k2.plan.deployment import preset_names

model, *presets = sys.argv[1:]
for preset in presets or preset_names():
    try:
        report = plan(model, preset)
    except ConfigError as error:  # the ranks cannot share this model's sizes
        print(f"{preset:32} no: {error}")
        continue
    memory, tpot = report["rank_memory"], report["modelled"]["tpot"]
    share = f"{memory['needed'] / 1e9:6.1f} of {memory['usable'] / 1e9:6.1f} GB a rank"
    print(f"{preset:32} {'fits' if memory['fits'] else 'too large':10} {share}, TPOT {tpot * 1e3:.2f} ms (modelled)")
