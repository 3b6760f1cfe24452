"""The command line: `torchrun … -m crystalllm.examples.gpt --tp 2 …`."""

from .train import main

if __name__ == "__main__":
    main()
