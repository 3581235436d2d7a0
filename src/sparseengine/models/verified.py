"""What was checked of each architecture, and how. Tests compare this table with what they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Evidence for one architecture.

    logits: fp32 logits equal transformers' within 1e-4 on tiny seeded checkpoints: whole, chunked,
      batched and after a preemption, in every test run.
    weights: a published checkpoint whose greedy tokens equal transformers', in every test run.
    device: a shape that ran on an accelerator with random weights, kernels equal to their twins.
    """

    logits: bool = False
    weights: str = ""
    device: str = ""


VERIFIED: dict[str, Verified] = {
    "DeepseekV2ForCausalLM": Verified(logits=True),
    "DeepseekV3ForCausalLM": Verified(logits=True),
    "Gemma2ForCausalLM": Verified(logits=True),
    "Gemma3ForCausalLM": Verified(logits=True, weights="Gemma 3 270M", device="gemma-3-27b"),
    "Gemma3ForConditionalGeneration": Verified(logits=True),
    "GemmaForCausalLM": Verified(logits=True),
    "Glm4MoeLiteForCausalLM": Verified(logits=True, device="glm-4.7-flash"),
    "LlamaForCausalLM": Verified(logits=True, weights="SmolLM2-135M"),
    "MinistralForCausalLM": Verified(logits=True),
    "MistralForCausalLM": Verified(logits=True),
    "MixtralForCausalLM": Verified(logits=True),
    "Phi3ForCausalLM": Verified(logits=True),
    "Qwen2ForCausalLM": Verified(logits=True),
    "Qwen3ForCausalLM": Verified(logits=True, device="qwen3-8b"),
    "Qwen3MoeForCausalLM": Verified(logits=True, device="qwen3-30b-a3b"),
}
