"""The command line: one file per subcommand, each of which parses, calls and prints."""
