//! Numbers of parameters of published models. The bench `counts` includes this file too, by `#[path]`: the
//! parent module must import the crate under the name `zoo`.

use super::zoo::family::published_switch_count;
use super::zoo::{ModelSpec, ZooError};

/// A count, and what it is published as.
pub(crate) struct Count {
    pub(crate) of: String,
    pub(crate) counted: u64,
    pub(crate) published: u64,
}

/// Returns the counts of all models, of what a token meets in mixtures of experts, and of Switch Transformers.
pub(crate) fn counts() -> Result<Vec<Count>, ZooError> {
    let mut all = Vec::new();
    for (name, published) in PARAMETERS {
        let counted = ModelSpec::preset(name)?.parameters();
        all.push(Count { of: name.to_owned(), counted, published });
    }
    for (name, published) in ACTIVE {
        let counted = ModelSpec::preset(name)?.active_parameters();
        all.push(Count { of: format!("{name}, active"), counted, published });
    }
    for (experts, published) in SWITCH {
        let counted = published_switch_count(experts);
        all.push(Count { of: format!("switch-base-{experts}"), counted, published });
    }
    Ok(all)
}

const ACTIVE: [(&str, u64); 2] = [("mixtral-8x7b", 12_879_925_248), ("mixtral-8x22b", 39_161_468_928)];

const SWITCH: [(u64, u64); 6] = [
    (8, 619_339_008),
    (16, 1_072_397_568),
    (32, 1_978_514_688),
    (64, 3_790_748_928),
    (128, 7_415_217_408),
    (256, 14_664_154_368),
];

const PARAMETERS: [(&str, u64); 53] = [
    ("gpt2", 124_439_808),
    ("gpt2-xl", 1_557_611_200),
    ("gpt-j-6b", 6_050_882_784),
    ("gpt-neox-20b", 20_554_567_680),
    ("pythia-70m", 70_426_624),
    ("pythia-160m", 162_322_944),
    ("pythia-410m", 405_334_016),
    ("pythia-1b", 1_011_781_632),
    ("pythia-1.4b", 1_414_647_808),
    ("pythia-2.8b", 2_775_208_960),
    ("pythia-6.9b", 6_857_302_016),
    ("pythia-12b", 11_846_072_320),
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
    ("tinyllama-1.1b", 1_100_048_384),
    ("llama-7b", 6_738_415_616),
    ("llama-13b", 13_015_864_320),
    ("llama-33b", 32_528_943_616),
    ("llama-65b", 65_285_660_672),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("llama-70b", 68_976_648_192),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3.1-405b", 405_853_388_800),
    ("llama3.2-1b", 1_235_814_400),
    ("llama3.2-3b", 3_212_749_824),
    ("mistral-7b", 7_241_732_096),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_630_071_296),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt3-small", 125_226_240),
    ("gpt3-medium", 355_871_744),
    ("gpt3-large", 760_300_032),
    ("gpt3-xl", 1_315_723_264),
    ("gpt3-2.7b", 2_651_553_280),
    ("gpt3-6.7b", 6_658_404_352),
    ("gpt3-13b", 12_853_386_240),
    ("gpt3-175b", 174_604_259_328),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_the_published_ones() {
        let all = counts().unwrap_or_default();
        assert!(all.len() > 50, "{}", all.len());
        for Count { of, counted, published } in all {
            assert_eq!(counted, published, "{of}");
        }
    }
}
