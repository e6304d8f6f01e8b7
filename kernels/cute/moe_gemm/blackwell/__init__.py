"""`moe_gemm` on Blackwell: `program` on the host, the other modules on the device."""
