"""A server of OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    bodies, requests, messages, errors
                             bodies of requests; answers that are errors
    chat_format, harmony     messages to prompts, tokens to parts of an answer
    grammars                 output that fits a schema or a grammar
    calls                    a call while it runs: engine output, errors, disconnect, shutdown
    answers, sse             pieces to one JSON body or to a stream of events
    chat, completions        the two endpoints
    service, settings        what the endpoints share
    metrics, logprobs        numbers
    app, server              routes and authentication; the process and its signals
    engine_process, engine_child, engine_messages
                             the engine in a process of its own
    load                     the other side: a client that measures a server

Needs ``pip install 'kernelcat[moe]'``.
"""
