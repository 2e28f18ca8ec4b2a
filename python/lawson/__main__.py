from lawson._cli import main

main()
