"""`moe_gemm` on Blackwell's tensor cores: `program` on the host, the other modules on the device."""
