class RequestOutputKind:
    DELTA, FINAL_ONLY = "delta", "final"
