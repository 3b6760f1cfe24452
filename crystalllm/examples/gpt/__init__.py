"""A GPT that trains under torchrun in any layout of TP, PP, VP, DP, CP and EP.

From PyTorch's own parts; it knows nothing of CrystalLLM. Expected on two cores:

    python -m crystalllm.examples.gpt                                     one rank, 3 s
    torchrun --standalone --nproc-per-node 8 \\
        -m crystalllm.examples.gpt --tp 2 --pp 2 --steps 20               dense, 40 s
    torchrun --standalone --nproc-per-node 4 \\
        -m crystalllm.examples.gpt --num-experts 8 --ep 4                 experts, 20 s

Reading order: config (what a layout is and which ones exist), data, model, moe,
parallel (one model spread over ranks), pipeline (the order of microbatches),
optimizer, checkpoint, log, train (the loop).
"""
