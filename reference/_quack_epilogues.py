"""Epilogues of QuACK's grouped products.

QuACK reads the source of these functions, so the functions are in a module that imports QuACK. Its
`gemm_gated` is made of the same parts, but knows gpt-oss's SwiGLU only without the clamp.
"""

from quack.activation import swiglu, swiglu_oai
from quack.epilogue import gemm_epilogue, unpack

from kernelcat.reference._experts import ALPHA, LIMIT


@gemm_epilogue()
def _plain(acc):
    return {"D": acc}


@gemm_epilogue()
def _plain_bias(acc, bias):
    return {"D": acc + bias}


@gemm_epilogue(outputs=("h",), mode="acc_pair")
def _swiglu(acc):
    gate, up = unpack(acc)
    return {"h": swiglu(gate, up)}


@gemm_epilogue(outputs=("h",), mode="acc_pair")
def _swiglu_bias(acc, bias):
    gate, up = unpack(acc + bias)
    return {"h": swiglu(gate, up)}


@gemm_epilogue(outputs=("h",), mode="acc_pair")
def _swiglu_oai(acc):
    gate, up = unpack(acc)
    return {"h": swiglu_oai(gate, up, alpha=ALPHA, limit=LIMIT)}


@gemm_epilogue(outputs=("h",), mode="acc_pair")
def _swiglu_oai_bias(acc, bias):
    gate, up = unpack(acc + bias)
    return {"h": swiglu_oai(gate, up, alpha=ALPHA, limit=LIMIT)}


EPILOGUES = {
    ("none", False): (_plain, "D"),
    ("none", True): (_plain_bias, "D"),
    ("swiglu", False): (_swiglu, "h"),
    ("swiglu", True): (_swiglu_bias, "h"),
    ("swiglu_oai", False): (_swiglu_oai, "h"),
    ("swiglu_oai", True): (_swiglu_oai_bias, "h"),
}
"""Activation and whether there is a bias -> the epilogue, and the name of the epilogue's output."""
