// Kimi delta attention: a decay for each channel of K; see README.md for how products are decayed.
#include "delta_rule.h"
#include "delta_rule_kimi.h"

TH_EXPORT_DELTA_RULE(th::delta::KimiDeltaAttention, recurrent_kimi_delta_attention,
                     chunk_kimi_delta_attention)
