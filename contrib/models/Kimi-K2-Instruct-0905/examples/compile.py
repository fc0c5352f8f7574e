"""Compile Kimi-K2 for one trn2.48xlarge and write the ranks' weights beside the graphs.

python examples/compile.py /models/Kimi-K2-Instruct-0905 /compiled
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.generate import set_environment

FORMS = {"blocks": "blockwise_symmetric", "channel": "expert_wise_per_channel_symmetric", "bf16": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("compiled", help="directory for graphs and weights")
    parser.add_argument("--experts", choices=FORMS, default="blocks", help="how the routed experts are held")
    parser.add_argument("--tp-degree", type=int, default=64, help="all ranks: logical cores")
    parser.add_argument("--moe-ep-degree", type=int, default=2, help="1: TP64/EP1")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024, help="prompt and answer")
    parser.add_argument("--max-context-length", type=int, default=512, help="prompt")
    parser.add_argument("--output-logits", action="store_true", help="for test_logits")
    options = parser.parse_args()
    set_environment()
    from src import KimiK2InferenceConfig, KimiK2NeuronConfig, NeuronKimiK2ForCausalLM, load_kimi_config

    form = FORMS[options.experts]
    several = {"is_continuous_batching": True, "ctx_batch_size": 1} if options.batch_size > 1 else {}
    neuron = KimiK2NeuronConfig(
        tp_degree=options.tp_degree,
        moe_ep_degree=options.moe_ep_degree,
        moe_tp_degree=options.tp_degree // options.moe_ep_degree,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        max_context_length=options.max_context_length,
        enable_bucketing=True,
        context_encoding_buckets=sorted({min(128, options.max_context_length), options.max_context_length}),
        token_generation_buckets=sorted({min(512, options.seq_len), options.seq_len}),
        on_device_sampling_config={"do_sample": False},
        output_logits=options.output_logits,
        save_sharded_checkpoint=True,
        **({"quantized": True, "quantization_type": form} if form else {}),
        **several,
    )
    config = KimiK2InferenceConfig(neuron, load_config=load_kimi_config(options.model))
    NeuronKimiK2ForCausalLM(options.model, config).compile(options.compiled)


if __name__ == "__main__":
    main()
