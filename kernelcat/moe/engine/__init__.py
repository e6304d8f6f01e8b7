"""What an engine keeps on the host while a model runs: requests, pages, steps and text.

Nothing here needs a GPU or torch:

    request, parameters, limits    what is asked for, and what is refused
    pages, blocks, block_hashes    who has which page of the caches; the prefix cache
    queue, scheduler, step         which new tokens the next run of the model computes
    step_arrays                    the step as arrays of fixed buffers, for the models' batch
    speculation                    drafts from a request's own tokens, and their verification
    text                           tokens to final text, stop strings
    integrity                      proof that all of these agree
"""
