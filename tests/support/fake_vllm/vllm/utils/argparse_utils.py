import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self):
        return self.parse_known_args()[0]
