// What a real backend accepts and with which words it refuses the rest. A
// program that fails on the cluster has to fail here in the same way.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

namespace crystal {

enum class Flavour { gloo, nccl };
const char* to_string(Flavour flavour);

class Checks {
 public:
  Checks(Flavour flavour, int rank, int size) : flavour_(flavour), rank_(rank), size_(size) {}

  void all_reduce(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) const;
  void all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                            const c10d::ReduceOp& op) const;
  void reduce(const std::vector<at::Tensor>& tensors, int64_t root, int64_t root_tensor,
              const c10d::ReduceOp& op) const;
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t root, int64_t root_tensor) const;
  void all_gather(const std::vector<std::vector<at::Tensor>>& outputs,
                  const std::vector<at::Tensor>& inputs) const;
  void all_gather_flat(const at::Tensor& output, const at::Tensor& input) const;
  void all_gather_coalesced(const std::vector<std::vector<at::Tensor>>& outputs,
                            const std::vector<at::Tensor>& inputs) const;
  void reduce_scatter(const std::vector<at::Tensor>& outputs,
                      const std::vector<std::vector<at::Tensor>>& inputs,
                      const c10d::ReduceOp& op) const;
  void reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input,
                           const c10d::ReduceOp& op) const;
  void all_to_all(const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs) const;
  void all_to_all_flat(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<int64_t>& out_splits,
                       const std::vector<int64_t>& in_splits) const;
  void gather(const std::vector<std::vector<at::Tensor>>& outputs,
              const std::vector<at::Tensor>& inputs, int64_t root) const;
  void scatter(const std::vector<at::Tensor>& outputs,
               const std::vector<std::vector<at::Tensor>>& inputs, int64_t root) const;
  void send(const std::vector<at::Tensor>& tensors, int64_t peer) const;
  void recv(const std::vector<at::Tensor>& tensors, int64_t peer) const;

 private:
  void dtype(const at::Tensor& tensor) const;
  void reducible(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  void peer_in_group(const char* what, int64_t peer) const;

  Flavour flavour_;
  int rank_;
  int size_;
};

} // namespace crystal
