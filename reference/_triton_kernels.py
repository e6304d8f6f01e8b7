"""OpenAI's `triton_kernels` as a peer (package `tokenspeed-triton-kernels`)."""

from __future__ import annotations

from kernelcat.reference._peers import required_by


def load():
    """The package, ready for Triton 3.6; raises ``MissingDependency``.

    The package is written for Triton 3.8. What Triton 3.6 lacks is added to Triton's modules: a
    predicate for an AMD GPU, the line numbers of a function, and ``cdiv`` of constants.
    """
    with required_by("triton_kernels", "pip install tokenspeed-triton-kernels"):
        import triton
        import triton.language.target_info as info

        if not hasattr(info, "is_hip_gfx1250"):
            info.is_hip_gfx1250 = triton.constexpr_function(_is_never)
            function = triton.runtime.jit.JITFunction
            function.def_file_line_number = function.def_file_col_number = 0
            _fold_constants_in_cdiv(triton.language)
        import triton_kernels
    return triton_kernels


def _is_never():
    return False


def _fold_constants_in_cdiv(tl):
    @tl.core.builtin
    def cdiv(x, div, _semantic=None):
        constants = [isinstance(value, tl.constexpr) for value in (x, div)]
        if all(constants):
            return tl.constexpr(-(-x.value // div.value))
        x, div, one = (_semantic.to_tensor(getattr(v, "value", v)) for v in (x, div, 1))
        last = _semantic.sub(_semantic.add(x, div, True), one, True)
        return _semantic.floordiv(last, div)

    cdiv.__module__, tl.cdiv = "triton.language.core", cdiv
