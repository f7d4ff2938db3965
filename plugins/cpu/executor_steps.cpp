// One step: the indices that it follows are looked at, and its kernel is called.
#include "executor.h"

namespace ew {

void Executor::execute(const ResolvedStep& step) {
  const KernelTable& k = resources_->kernels();
  ThreadPool& pool = resources_->pool();
  if (step.check.rule != IndexRule::none) {
    const size_t index = static_cast<size_t>(step.index);
    check_indices(step.check, step_title(index, program_.steps()[index]), places_);
  }
  const auto run = [&]<class Args>(void (*kernel)(const Args&, ThreadPool&)) {
    kernel(std::get<Args>(step.arguments), pool);
  };
  switch (step.op) {
    case Op::embedding:
      if (std::holds_alternative<EmbeddingFp8Args>(step.arguments)) return run(k.embedding_fp8);
      return std::holds_alternative<EmbeddingArgs>(step.arguments) ? run(k.embedding) : run(k.embedding_bf16);
    case Op::linear:
      if (std::holds_alternative<LinearFp8Args>(step.arguments)) return run(k.linear_fp8);
      return std::holds_alternative<LinearArgs>(step.arguments) ? run(k.linear) : run(k.linear_bf16);
    case Op::rms_norm:
      return run(k.rms_norm);
    case Op::layer_norm:
      return run(k.layer_norm);
    case Op::add_rms_norm:
      return run(k.add_rms_norm);
    case Op::add_layer_norm:
      return run(k.add_layer_norm);
    case Op::rope_table:
      return run(k.rope_table);
    case Op::rope:
      return run(k.rope);
    case Op::gated_activation:
      return run(k.gated_activation);
    case Op::kv_write:
      return run(k.kv_write);
    case Op::paged_attention:
      return run(k.paged_attention);
    case Op::take_rows:
      return run(k.take_rows);
    case Op::elementwise:
      return run(k.elementwise);
    case Op::copy:
      return run(k.copy);
    case Op::reduce:
      return run(k.reduce);
    case Op::cast_bf16:
      return run(k.cast_bf16);
    case Op::quantize_activation:
      return run(k.quantize_activation);
    case Op::quantized_linear:
      return std::holds_alternative<LinearInt4Args>(step.arguments) ? run(k.linear_int4) : run(k.linear_int8);
    case Op::quantized_embedding:
      return std::holds_alternative<EmbeddingInt4Args>(step.arguments) ? run(k.embedding_int4)
                                                                       : run(k.embedding_int8);
    case Op::route_experts:
      return run(k.route_experts);
    case Op::grouped_linear:
      if (std::holds_alternative<Grouped<LinearFp8Args>>(step.arguments)) return run(k.grouped_linear_fp8);
      return std::holds_alternative<Grouped<LinearArgs>>(step.arguments) ? run(k.grouped_linear)
                                                                         : run(k.grouped_linear_bf16);
    case Op::quantized_grouped_linear:
      return std::holds_alternative<Grouped<LinearInt4Args>>(step.arguments) ? run(k.grouped_linear_int4)
                                                                             : run(k.grouped_linear_int8);
    case Op::combine_experts: {
      CombineExpertsArgs args = std::get<CombineExpertsArgs>(step.arguments);
      args.places = places_.data();
      return k.combine_experts(args, pool);
    }
    case Op::top_k:
      return run(k.top_k);
    case Op::gather:
      return run(k.gather);
    case Op::scatter:
      return run(k.scatter);
    case Op::rms_norm_quantize:
      return run(k.rms_norm_quantize);
    case Op::layer_norm_quantize:
      return run(k.layer_norm_quantize);
    case Op::add_rms_norm_quantize:
      return run(k.add_rms_norm_quantize);
    case Op::add_layer_norm_quantize:
      return run(k.add_layer_norm_quantize);
    case Op::gated_activation_quantize:
      return run(k.gated_activation_quantize);
    case Op::rope_kv_write:
      return run(k.rope_kv_write);
  }
}

}  // namespace ew
