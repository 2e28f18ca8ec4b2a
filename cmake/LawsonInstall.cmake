# installed in a later step
