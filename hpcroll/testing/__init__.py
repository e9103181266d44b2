"""For tests and demos: a scripted policy server, and the contract suites for plug-in authors."""
