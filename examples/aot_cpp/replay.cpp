// Runs a package on saved inputs with torch's own loader and compares the results: replay model.pt2 calls.pt
// Python writes the calls: torch.save([[inputs, results], ...], "calls.pt"), each a list of tensors.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace {

// The largest difference, relative to the largest element of `want`.
double difference(const at::Tensor& got, const at::Tensor& want) {
  if (got.sizes() != want.sizes()) throw std::runtime_error("a result has another size");
  return (got - want).abs().max().item<double>() / want.abs().max().item<double>();
}

std::vector<at::Tensor> tensors(const c10::IValue& list) {
  std::vector<at::Tensor> all;
  for (const c10::IValue& element : list.toListRef()) all.push_back(element.toTensor());
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: replay PACKAGE CALLS\n";
    return 2;
  }
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    torch::inductor::AOTIModelPackageLoader loader(argv[1]);
    const c10::IValue calls = torch::jit::pickle_load(bytes);
    double largest = 0;
    bool right = true;  // a difference that is NaN is not
    for (const c10::IValue& call : calls.toListRef()) {
      const std::vector<at::Tensor> want = tensors(call.toListRef()[1]);
      const std::vector<at::Tensor> got = loader.run(tensors(call.toListRef()[0]));
      if (got.size() != want.size()) throw std::runtime_error("the package returns another number of results");
      for (size_t k = 0; k < got.size(); ++k) {
        const double found = difference(got[k], want[k]);
        right = right && found <= 1e-4;
        largest = std::max(found, largest);
      }
    }
    std::cout << "difference " << largest << "\n";
    return right ? 0 : 1;
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
