from megagraph.cli import main

main()
