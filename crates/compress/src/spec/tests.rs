//! Parsing, printing and properties of codec names.

use super::*;

#[test]
fn feedback_is_added_where_there_is_something_to_feed_back() {
    let with = |name: &str| name.parse::<CodecSpec>().expect(name).with_feedback().to_string();
    assert_eq!([with("int8"), with("topk:0.01/f16")], ["int8+ef", "topk:0.01/f16+ef"]);
    assert_eq!([with("int4+ef:0.95"), with("none")], ["int4+ef:0.95", "none"]);
    assert_eq!([with("unbiased:10/f16"), with("none+lz4")], ["unbiased:10/f16", "none+lz4"]);
    assert_eq!([with("int8+zstd"), with("topk:0.1")], ["int8+ef+zstd", "topk:0.1/none+ef"]);
    assert_eq!(CodecSpec::default(), "none".parse().expect("none"));
    // Stochastic rounding is unbiased and needs no feedback; with a selection in front of it, feedback is
    // needed again.
    for name in ["int2-sr", "qsgd2:64", "terngrad", "natural", "uint8-sr+zstd"] {
        assert_eq!(with(name), name);
        let behind = format!("topk:0.1/{name}");
        assert!(with(&behind).contains("+ef"), "{behind}");
    }
}

#[test]
fn names_print_as_they_parse() {
    for name in [
        "none",
        "f16",
        "bf16",
        "int8",
        "int8:1",
        "int8:4096",
        "none+ef",
        "bf16+ef",
        "int8:64+ef",
        "none+lz4",
        "int8:64+ef:0.5+zstd",
    ] {
        assert_eq!(name.parse::<CodecSpec>().unwrap().to_string(), name);
    }
    assert_eq!("int8:256".parse::<CodecSpec>().unwrap().to_string(), "int8");
    let method = |name: &str| name.parse::<CodecSpec>().unwrap().method();
    assert_eq!([method("int4:32+ef"), method("topk:0.1/int4")], [Some(("int4", 32)), None]);
    let spec: CodecSpec = "dct:8/topk:4of64/sign+ef".parse().unwrap();
    let (side, top) = spec.dct().unwrap();
    assert_eq!((side, top.to_string().as_str()), (8, "topk:4of64/sign"));
    let (select, sign) = top.select().unwrap();
    assert_eq!((select, sign.method()), (Select::PerChunk { chunk: 64, kept: 4 }, Some(("sign", 4096))));
    assert!(spec.select().is_none() && top.dct().is_none() && top.mask().is_none());
}

#[test]
fn momentum_correction_has_a_short_name_and_results_have_feedback_alone() {
    let spec = |name: &str| name.parse::<CodecSpec>().unwrap();
    assert_eq!(spec("dgc:0.01"), spec("topk:0.01+dgc"));
    assert_eq!(spec("dgc:0.01+zstd").to_string(), "topk:0.01/none+dgc+zstd");
    assert_eq!(spec("topk:0.01/f16+dgc:0.95").to_string(), "topk:0.01/f16+dgc:0.95");
    assert_eq!(spec("topk:0.01+dgc").momentum(), Some(0.9));
    assert_eq!((spec("topk:0.01+dgc").feedback_share(), spec("topk:0.01+ef").momentum()), (None, None));
    assert_eq!(spec("dgc:0.01").of_results(), spec("topk:0.01+ef"));
    assert_eq!(spec("int8+ef:0.5").of_results(), spec("int8+ef:0.5"));
    assert_eq!(spec("dgc:0.01").with_feedback(), spec("dgc:0.01"));
    for (bad, said) in [
        ("dgc:0.01+ef", "has error feedback with momentum already"),
        ("dgc:0", "selects no elements"),
        ("topk:0.01+dgc:1.5", "is not a valid ending"),
        ("unbiased:4+dgc", "unbiased"),
    ] {
        let error = bad.parse::<CodecSpec>().unwrap_err().to_string();
        assert!(error.contains(said), "{bad}: {error}");
    }
}

#[test]
fn blocks_where_none_is_named_are_the_documented_ones() {
    let (mut blocks, mut without) = (0, Vec::new());
    for method in METHODS {
        let expected = match method.name {
            "qsgd8" | "qsgd4" | "qsgd2" => 512,
            "terngrad" | "sign" | "sign-l2" => 4096,
            "meanstd8" | "meanstd2" | "quantile8" | "quantile4" => 65536,
            _ => 256,
        };
        if method.block.is_none() {
            without.push(method.name);
            continue;
        }
        blocks += 1;
        let spec: CodecSpec = method.name.parse().unwrap();
        assert_eq!(spec.method(), Some((method.name, expected)));
        assert_eq!(spec, format!("{}:{expected}", method.name).parse().unwrap());
    }
    assert_eq!((blocks, without), (30, vec!["none", "f16", "bf16", "natural"]));
}

#[test]
fn every_listed_name_parses() {
    let example = |name: String| {
        let values =
            [("AMOUNT", "0.01"), ("KEPTofCHUNK", "3of8"), ("VALUE", "0.5"), ("STRIDE", "7"), ("SIDE", "8")];
        let name = values.iter().fold(name, |name, (what, value)| name.replace(what, value));
        name.replace("[:BLOCK]", "").replace("[xMULTIPLE]", "x2").replace("[/...]", "/int4:32")
    };
    for name in names() {
        let plain = example(name);
        if plain.starts_with("unbiased") {
            assert_eq!(parse(&format!("{plain}+ef")).unwrap_err(), CompressError::UnbiasedFeedback);
            continue;
        }
        for name in [plain.clone(), format!("{plain}+ef")] {
            assert_eq!(name.parse::<CodecSpec>().unwrap().feedback(), name.ends_with("+ef"));
        }
    }
}

#[test]
fn a_part_that_is_wrong_is_named() {
    for (name, part, why) in [
        ("int8:", "int8:", "needs a block"),
        ("int8:x", "int8:x", "needs a block"),
        ("topk:0.1/int8:-1+ef", "int8:-1", "needs a block"),
        ("f16:4", "f16:4", "takes no block size"),
        ("int8:256+EF", "+EF", "is not a valid ending"),
        ("none+ef+ef", "+ef+ef", "is not a valid ending"),
        ("none+zstd+ef", "+zstd+ef", "is not a valid ending"),
        ("none+lz4+zstd", "+lz4+zstd", "is not a valid ending"),
        ("int8+ef:1.5", "+ef:1.5", "is not a valid ending"),
        ("none/none", "none", "comes after the method"),
        ("int8/topk:0.1", "topk:0.1", "comes after the method"),
        ("topk:0.1/topk:0.2/topk:0.3/none", "topk:0.3", "is a third stage"),
        ("sign/", "", "comes after the method"),
        ("rolling:0", "rolling:0", "needs whole numbers"),
        ("topk:0", "topk:0", "selects no elements"),
        ("topk:0.0/int8", "topk:0.0", "selects no elements"),
        ("rolling:10/topk:5x128/int4:128", "topk:5x128", "selects no elements"),
        ("sampled:0/f16+ef", "sampled:0", "selects no elements"),
        ("topk:0of64", "topk:0of64", "needs whole numbers"),
        ("random:10x0/int8", "random:10x0", "needs whole numbers"),
        ("topk:3of0", "topk:3of0", "needs whole numbers"),
        ("threshold:-1", "threshold:-1", "needs a finite number"),
        ("threshold:inf", "threshold:inf", "needs a finite number"),
    ] {
        let error = name.parse::<CodecSpec>().unwrap_err();
        let CompressError::CodecName { name: whole, part: found, why: because } = &error else {
            unreachable!("{name}: {error}")
        };
        assert_eq!((&**whole, &**found), (name, part));
        assert!(because.starts_with(why), "{error}");
    }
    let text = parse("rolling:0").unwrap_err().to_string();
    assert_eq!(text, r#"codec "rolling:0": "rolling:0" needs whole numbers of at least 1"#);
    assert_eq!("threshold:1e+3".parse::<CodecSpec>().unwrap().to_string(), "threshold:1000.0/none");
}

#[test]
fn an_unknown_name_is_answered_with_the_names() {
    for name in ["", "int9", "+ef", "+zstd", "NONE", "topk", "topk:0.1/", "int9:4/none", "top:4"] {
        let error = name.parse::<CodecSpec>().unwrap_err();
        assert_eq!(error, CompressError::UnknownCodec { name: name.to_owned() });
    }
    let text = parse("zip").unwrap_err().to_string();
    assert!(
        text.starts_with("unknown codec \"zip\"; the codecs are none, f16, bf16, int8[:BLOCK], "),
        "{text}"
    );
    for block in ["0", "1048577"] {
        let error = parse(&format!("int8:{block}")).unwrap_err();
        assert!(matches!(error, CompressError::BlockSize { .. }), "{error}");
    }
}
