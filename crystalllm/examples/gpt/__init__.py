"""A GPT that trains under torchrun in any layout of TP, PP, VP, DP, CP and EP.

torchrun --standalone --nproc-per-node 8 -m crystalllm.examples.gpt --tp 2 --pp 2

Reading order: config (what a layout is and which ones exist), data, model, moe,
parallel (one model spread over ranks), pipeline (the order of microbatches),
optimizer, checkpoint, log, train (the loop).
"""
