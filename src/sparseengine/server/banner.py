"""What `serve` says when it is ready: model, memory, methods, limits, routes."""

from __future__ import annotations

from sparseengine.server.service import Service

ROUTES = (
    ("/v1/chat/completions", "OpenAI"),
    ("/v1/completions", "OpenAI"),
    ("/v1/responses", "OpenAI"),
    ("/v1/messages", "Anthropic"),
    ("/ui", "a page to talk and look"),
    ("/v1/models  /tokenize  /detokenize", ""),
    ("/health  /ping  /version  /metrics  /server_info  /reset_prefix_cache", ""),
)


def banner(service: Service, url: str) -> str:
    info, settings = service.info, service.settings
    keys = "API key needed" if settings.api_keys else "no API key: anyone who can connect may ask"
    others = ", ".join(info.methods[1:])
    lines = [
        info.memory_text,
        f"model      {', '.join(service.names)} on {info.device}, up to {info.max_model_len:,} "
        "tokens",
        f"method     {info.methods[0]}" + (f" by default; also {others}" if others else ""),
        f"requests   {info.max_num_seqs:,} in a step at most, {settings.max_queue:,} may wait",
        f"access     {keys}",
        "routes",
        *(f"  {path}  {kind}".rstrip() for path, kind in ROUTES),
        f"serving    {url}",
    ]
    return "\n".join(lines)
