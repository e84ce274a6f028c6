// The gated delta rule: one decay for all channels of a value head.
#include "delta_rule.h"
#include "delta_rule_gated.h"

TH_EXPORT_DELTA_RULE(th::delta::GatedDeltaRule, recurrent_gated_delta_rule, chunk_gated_delta_rule)
