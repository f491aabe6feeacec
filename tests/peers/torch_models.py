#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, torchvision and timm, trained by libfsdp.torch.shard on two ranks and by torch alone.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_models.py [--steps N] [--mode MODE] [NAME...]

Each model as its library makes it, in training mode without dropout, with weights from a seed. The ranks have batches
of their own; torch alone takes the mean of their gradients. MODE is mapped, copied or debug; default: all. A model
whose library is missing is skipped with the reason. Reports in the Test Anything Protocol.
"""

import argparse
import sys

import torch
from torch import nn
from torch_check import MODES, difference, train_alone, train_sharded

RANKS, BATCH, LENGTH, VOCABULARY, IMAGE = 2, 4, 10, 61, 64
RATE, EPSILON = 1e-3, 1e-3
# A squeeze layer comes to the kink of its ReLU at the usual rate, where one rounding becomes a difference of 1e-4.
RATES = {"MobileNetV3": 2e-4}


def tokens_of(step, rank):
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(9 * step + rank))


def images_of(step, rank, size=IMAGE):
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(9 * step + rank))


def labels_of(step):
    return torch.tensor([(step + place) % 5 for place in range(BATCH)])


def language(make, config, **fields):
    def build():
        import transformers

        shape = dict(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
        shape.update(fields)
        return getattr(transformers, make)(getattr(transformers, config)(**shape))

    return build, lambda model, step, rank: model(input_ids=tokens_of(step, rank), labels=tokens_of(step, rank)).loss


def gpt2():
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=3, n_head=2)
    )


def t5():
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
    )


def vit():
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=IMAGE,
            patch_size=8, num_labels=5,
        )
    )


def clip():
    import transformers

    text = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=LENGTH, projection_dim=8, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE,
                  patch_size=8, projection_dim=8)
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def vgg():
    from torchvision.models import vgg

    model = vgg.VGG(vgg.make_layers([8, "M", 16, "M", 16, 16, "M"], batch_norm=True), num_classes=5)
    model.classifier = nn.Sequential(nn.Linear(16 * 49, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5))
    return model


def image_loss(model, step, rank):
    return nn.functional.cross_entropy(model(images_of(step, rank)), labels_of(step))


def vision(library, name, **fields):
    def build():
        if library == "timm":
            import timm

            return timm.create_model(name, num_classes=5, **fields)
        import torchvision

        return getattr(torchvision.models, name)(num_classes=5, **fields)

    return build, image_loss


def token_loss(model, step, rank):
    return model(input_ids=tokens_of(step, rank), labels=tokens_of(step, rank)).loss


MODELS = {
    "GPT2": (gpt2, token_loss),
    "Llama": language("LlamaForCausalLM", "LlamaConfig"),
    "Llama, tied": language("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True),
    "Mixtral": language("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": language(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1,
    ),
    "BERT": language("BertForMaskedLM", "BertConfig"),
    "T5": (t5, token_loss),
    "ViT": (vit, lambda model, step, rank: model(pixel_values=images_of(step, rank), labels=labels_of(step)).loss),
    "CLIP": (clip, lambda model, step, rank: model(
        input_ids=tokens_of(step, rank), pixel_values=images_of(step, rank), return_loss=True).loss),
    "VGG": (vgg, image_loss),
    "MobileNetV3": vision("torchvision", "mobilenet_v3_small"),
    "DenseNet": vision("torchvision", "DenseNet", growth_rate=8, block_config=(2, 2, 2), num_init_features=16),
    "ConvNeXt": vision("timm", "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    number = failed = 0
    for name, (build, loss_of) in MODELS.items():
        if options.names and name not in options.names:
            continue
        torch.manual_seed(1)
        rate = RATES.get(name, RATE)
        try:
            model = build()
        except ImportError as error:
            number += 1
            print(f"ok {number} - {name} # SKIP {error}")
            continue
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        model.train()

        def step_of(model, step, rank, loss_of=loss_of):
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss.detach()

        wanted, _ = train_alone(model, step_of, options.steps, rate, EPSILON, RANKS)
        for mode in [options.mode] if options.mode else MODES:
            number += 1
            try:
                found, _ = train_sharded(model, step_of, options.steps, rate, mode, EPSILON, RANKS)
                differ = difference(found, wanted)
                told = f"losses {wanted[0]:.4f} to {wanted[-1]:.4f}, differ by {differ:.1e}"
            except Exception as error:
                differ, told = float("inf"), f"{type(error).__name__}: {str(error)[:300]}"
            is_right = differ < 1e-5
            failed += not is_right
            print(f"{'ok' if is_right else 'not ok'} {number} - {name}, {mode} # {told}", flush=True)
    print(f"1..{number}")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
