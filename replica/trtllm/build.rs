//! Compiles the C++ shim, with the vendor's headers or with those of the test double.

#[cfg(any(feature = "tensorrt-llm", feature = "tensorrt-llm-double"))]
#[path = "build/compile.rs"]
mod compile;
#[cfg(feature = "tensorrt-llm")]
#[path = "build/find.rs"]
mod find;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(any(feature = "tensorrt-llm", feature = "tensorrt-llm-double"))]
    compile::compile();
}
