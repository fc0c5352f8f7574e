"""The router: its GEMM and the noaux_tc gate."""
