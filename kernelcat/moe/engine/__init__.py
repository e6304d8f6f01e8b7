"""An engine that runs a model for many requests at once.

What it keeps on the host needs neither a GPU nor torch:

    request, parameters, constraint, limits    what is asked for, and what is refused
    pages, blocks, block_hashes                who has which page of the caches; the prefix cache
    queue, scheduler, step                     which new tokens the next run of the model computes
    step_sizes, step_arrays                    the step as arrays of fixed buffers, in few sizes
    speculation                                drafts from a request's own tokens
    text, token_bits                           tokens to final text, stop strings; sets of tokens
    integrity, statistics                      proof that all of these agree, and numbers

The rest runs it:

    settings, memory, building, ahead          how many pages there are, and what is compiled first
    step_buffers, streams, runner, sampling    a step on the device: copies, graphs, chosen tokens
    engine, async_engine                       steps for a caller, or on a thread for asyncio
    served_engine, readers                     what a server needs of an engine, wherever it runs
"""
