"""What engines that people serve with (vLLM, SGLang) load of this project: parsers and operations, as their plugins."""
