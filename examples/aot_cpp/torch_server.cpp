// Loads a package with torch's own loader and runs it: torch_server model.pt2 ROWS COLUMNS
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: torch_server PACKAGE ROWS COLUMNS\n";
    return 2;
  }
  try {
    torch::inductor::AOTIModelPackageLoader loader(argv[1]);
    const auto input = torch::ones({std::atol(argv[2]), std::atol(argv[3])});
    for (const at::Tensor& t : loader.run({input})) std::cout << t.sizes() << " sum " << t.sum().item<double>() << "\n";
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
