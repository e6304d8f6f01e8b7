"""A server of OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    requests, errors         bodies of requests; answers that are errors
    chat_format, harmony     messages to prompts, tokens to parts of an answer
    calls                    a call while it runs: engine output, errors, disconnect, shutdown
    answers, sse             pieces to one JSON body or to a stream of events
    chat, completions        the two endpoints
    service, settings        what the endpoints share
    metrics, logprobs        numbers
    app, server              routes and authentication; the process and its signals
    load                     the other side: a client that measures a server

Needs ``pip install 'kernelcat[serve]'``.
"""
