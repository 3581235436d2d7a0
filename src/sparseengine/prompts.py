"""From what a caller writes to token ids: plain texts and conversations.

The one place where special tokens are decided, so that every path agrees: exactly one BOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseengine.core.params import SamplingParams
from sparseengine.errors import RequestError

Message = Mapping[str, Any]

# generation_config.json's names -> ours
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class Prompts:
    """A model's tokenizer (None: token ids only) and chat template. `name` is for messages."""

    def __init__(self, tokenizer: Any, name: str, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: special tokens as the tokenizer adds them, but never two BOS."""
        if self.tokenizer is None:
            raise RequestError("text prompts need a tokenizer, and this model has none")
        ids = list(self.tokenizer.encode(text))
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """A rendered conversation: the template writes the special tokens.

        A BOS that the tokenizer would add and the template left out is put in front.
        """
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        bos = self.tokenizer.bos_token_id
        adds_bos = bos is not None and list(self.tokenizer.encode(""))[:1] == [bos]
        if adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        """The prompt text of a conversation. Raises `RequestError` without a chat template.

        `template_arguments` are the template's own, e.g. enable_thinking.
        """
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this model has none")
        template = chat_template or self.chat_template
        if template is None and not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                f"the tokenizer of {self.name!r} has no chat template; give one "
                "(chat_template=, --chat-template) or use generate"
            )
        if not messages:
            raise RequestError("messages=[] is not allowed; give at least one message")
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_arguments,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return str(text)


def salt_of(prompt: object) -> str:
    """The cache salt that a prompt carries, "" for none. Raises `RequestError` if not text."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt={salt!r} is not allowed; it must be text")
    return salt or ""


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields that a model's generation_config.json suggests."""
    return {
        ours: generation_config[theirs]
        for theirs, ours in _DEFAULTS.items()
        if generation_config.get(theirs) is not None
    }


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**default_sampling(generation_config))
